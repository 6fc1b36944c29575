"""Host memory behind the page pool, for dense segments and whole resume points."""

from .jobs import Job
from .match import TierMatch
from .tiers import Tiers

__all__ = ["Job", "TierMatch", "Tiers"]

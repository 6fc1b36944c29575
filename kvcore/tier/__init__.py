"""The host tier behind the page pool: host memory for dense segments and whole resume points."""

from .jobs import Copies, Job
from .match import Share, TierMatch
from .places import TierSpec
from .tiers import Tiers

__all__ = ["Copies", "Job", "Share", "TierMatch", "TierSpec", "Tiers"]

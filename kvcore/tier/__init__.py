"""Tiers behind the page pool: host memory and disk for dense segments and whole resume points."""

from .hints import Answer
from .jobs import Copies, Job
from .match import Share, TierMatch
from .places import TierSpec
from .records import Journal, Record
from .tiers import Tiers

__all__ = [
    "Answer",
    "Copies",
    "Job",
    "Journal",
    "Record",
    "Share",
    "TierMatch",
    "TierSpec",
    "Tiers",
]

"""What the core asks this plug-in for."""

from .check import check_fits, dry_run, use_choices

__all__ = ["check_fits", "dry_run", "use_choices"]

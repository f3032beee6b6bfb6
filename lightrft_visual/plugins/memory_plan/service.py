"""What the core asks this plug-in for."""

from .check import check_fits, dry_run, use_chosen_sizes

__all__ = ["check_fits", "dry_run", "use_chosen_sizes"]

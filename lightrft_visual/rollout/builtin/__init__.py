"""Environments by name, one file each."""

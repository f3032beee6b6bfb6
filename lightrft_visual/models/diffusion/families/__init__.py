"""Diffusion families: one adapter a file; config/registry.py has their names and the pipelines that they read."""

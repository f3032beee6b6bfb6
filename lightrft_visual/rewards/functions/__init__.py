"""Built-in scorers, one a file; `rewards/registry.py` lists their names.

A scorer is a callable that names what it reads, as a user's would be, and returns one score a sample: a number, None
where it does not apply, or `Failed` where it tried and could not.
"""

"""The cache of a host as a process of its own, shared by all engines there."""

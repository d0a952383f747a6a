"""Client of a Coppice cluster: see Client."""
from coppice.client import Client, Completion

__all__ = ["Client", "Completion"]

"""What Horovod is handed, and the rims that know a framework: torch.py (more to come)."""

from .compression import FFTCompression

__all__ = ["FFTCompression"]

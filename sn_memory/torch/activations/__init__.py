"""compress_activations: chosen tensors in few bits, modules that run again, the peak forecast.

It imports `trace`, `compress` and what is above them.
"""

"""compress_activations: inputs of layers in few bits, and the peak forecast.

It imports `modules`, `compress`, `trace` and what is above them.
"""

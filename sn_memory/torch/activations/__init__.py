"""compress_activations: keep the tensors that autograd saves in few bits."""

"""compress_activations: what autograd saves for the backward pass, in few bits."""

"""Steps under torch.compile: the setting of torch's own memory budget that measures fastest."""

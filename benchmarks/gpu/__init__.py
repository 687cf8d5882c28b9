"""What `make gpu` runs: one file a section, each with its JSON; `runner` starts them in turn."""

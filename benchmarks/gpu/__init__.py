"""The sections of `make gpu`: one file each, with its JSON; `runner` starts them in turn."""

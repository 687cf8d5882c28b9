"""The model as a plan sees it: settings, inputs, and one training step that is run and undone."""

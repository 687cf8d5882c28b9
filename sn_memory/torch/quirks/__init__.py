"""Special rules, one file for each library or kind of layer that needs them."""

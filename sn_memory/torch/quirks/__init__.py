"""Rules for one odd library or kind of layer, one file each."""

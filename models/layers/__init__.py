"""Building blocks of the text models: attention over pages, norms, linear layers, experts."""

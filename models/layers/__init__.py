"""What families of models are made of, and where keys and values of a layer lie."""

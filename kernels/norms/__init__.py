"""The residual sum of a layer's branch and the RMS norm behind it."""

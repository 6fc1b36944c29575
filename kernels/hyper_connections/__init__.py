"""Hyper-connections (mHC): a sub-block's input from the residual streams, and its result back."""

"""The gated product of an MLP: activation(gate) * up."""

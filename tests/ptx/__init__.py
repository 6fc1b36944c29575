"""An emulator of compiled Triton kernels on the CPU, which checks every access; for tests only."""

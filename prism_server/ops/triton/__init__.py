"""Operators written in Triton, for NVIDIA GPUs; in Triton's interpreter they run on a CPU, for tests."""

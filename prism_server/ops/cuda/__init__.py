"""Kernels in CUDA C++, compiled at start by NVRTC, where Triton cannot say what the memory system needs."""

"""Fused kernels for GPUs."""

"""The weight loader safetensors."""

"""Equal service to tenants."""

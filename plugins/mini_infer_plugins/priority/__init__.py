"""The more urgent request first."""

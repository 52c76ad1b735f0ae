"""The plain implementation of each interface: right before fast, on any device, used where no plugin answers."""

"""An engine elsewhere: in a thread, in a process of its own, behind one client protocol."""

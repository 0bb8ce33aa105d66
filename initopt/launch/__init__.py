"""`initopt launch`: torchrun, whose ranks are forked from a process that has imported the trainer's modules once."""

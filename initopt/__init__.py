"""initopt: the start-up of a TorchRec trainer as a graph of steps: recorded, checked, overlapped, measured."""

"""Write a model as one PyTorch file: a partial evaluation of the blocks' source with the values of the model."""

"""What is where in a model: the depth axis, roles and fused layouts, decided without the model.

`dynscope.hooks.model.anatomy` asks these rules about a live model, `dynscope.structure.names` about the
names and shapes of a checkpoint's tensors.
"""

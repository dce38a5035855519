"""torch_xla: devices, collectives, loaders, meshes."""

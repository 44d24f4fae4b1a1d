"""Any nn.Module with an entity table, sharded: the reference's lifecycle. Begin with `lifecycle`."""

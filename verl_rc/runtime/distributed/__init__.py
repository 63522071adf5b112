"""Process groups, device mesh, collectives and FSDP2: how trainer ranks work as one."""

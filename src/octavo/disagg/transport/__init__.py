"""Ways to move pages: Mooncake between processes, memory copies inside one."""

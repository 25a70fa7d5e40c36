"""The commands of ``distca``; each module holds one."""

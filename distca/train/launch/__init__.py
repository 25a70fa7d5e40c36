"""The work of the shell scripts: refuse mistakes, install what is missing, start ranks. It needs the standard library
only, because it runs before anything is installed."""

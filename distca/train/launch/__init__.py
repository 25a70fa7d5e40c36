"""What the shell scripts do: refuse mistakes, install what is missing, start ranks. Standard library only, because it
runs before anything is installed."""

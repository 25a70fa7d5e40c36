"""What ``distca`` does on the command line; each module holds one command."""

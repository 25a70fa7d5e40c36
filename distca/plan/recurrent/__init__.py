"""Plans of recurrent layers (linear attention, SSM): the rows and states that travel between ranks."""

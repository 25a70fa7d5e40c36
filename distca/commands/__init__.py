"""The commands of ``distca``. ``main.py`` says which module has each one's function; other modules help these."""

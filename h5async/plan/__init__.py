"""Sample numbers and a layout enter; what is to be read, decoded and placed leaves. Pure."""

"""An encoded chunk enters; what one filter of HDF5 made it from leaves. One format a file."""

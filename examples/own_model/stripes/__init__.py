"""A model and a dataset for tula: striped images, told apart by the direction of their stripes."""

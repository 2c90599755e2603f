"""What the kernel and dying processes say."""

from tula_cli.cli import main

main()

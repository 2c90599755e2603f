from tula_cli.cli.app import main

main()

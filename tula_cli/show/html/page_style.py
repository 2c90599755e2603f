"""The style sheet of a page: light and dark, from a telephone to a wide screen, and on paper."""

from tula_cli.show.html import palette

_SCREEN = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,
'DejaVu Sans',sans-serif;overflow-wrap:anywhere}
.page{max-width:78rem;margin:0 auto;padding:1.25rem 1rem 3rem}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.25rem;line-height:1.3;margin:2.75rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:0 0 .15rem}
p{max-width:75ch;margin:.5rem 0}
a{color:var(--link)}
.question{font-size:1.05rem;color:var(--muted)}
.answer{font-size:1.2rem;font-weight:600;max-width:60ch;border-left:.25rem solid var(--link);padding-left:.75rem}
.made,.caption,.paper{color:var(--muted);font-size:.875rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr));gap:.4rem 2rem;margin:1.25rem 0}
.facts div{display:grid;grid-template-columns:7.5rem 1fr;gap:.75rem}
.facts .long{grid-column:1/-1}.facts .long dd{max-width:75ch}
.facts dt{color:var(--muted)}.facts dd{margin:0}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;margin:.25rem 0 0}
nav h2{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);margin:0;padding:0;border:0}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:2rem 2.5rem;margin-top:1.25rem;
align-items:start}
figure{margin:0;min-width:0;max-width:38rem}
svg.figure{display:block;width:100%;height:auto;margin-top:.35rem}
figcaption p{margin:.15rem 0}
.missing{border:1px dashed var(--muted);border-radius:.35rem;padding:.6rem .8rem;max-width:75ch}
.scroll{overflow-x:auto;margin:1.25rem 0;max-width:100%;background:linear-gradient(to right,var(--paper) 1rem,transparent),
linear-gradient(to left,var(--paper) 1rem,transparent) 100% 0,linear-gradient(to right,var(--shade),transparent),
linear-gradient(to left,var(--shade),transparent) 100% 0;background-size:3rem 100%,3rem 100%,.8rem 100%,.8rem 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;padding-bottom:.4rem}
caption div{overflow-wrap:anywhere;position:sticky;left:0;width:max-content;max-width:min(75ch,calc(100vw - 2rem))}
caption strong{display:block;font-size:1rem}
th,td{padding:.28rem .7rem;vertical-align:top;text-align:right;white-space:nowrap}
th{border-bottom:1px solid var(--muted);vertical-align:bottom;font-weight:600}
th .unit{font-weight:400;color:var(--muted)}
td{border-bottom:1px solid var(--grid)}
th:first-child,td:first-child{padding-left:.2rem}
.left{text-align:left}
td.words{white-space:normal;min-width:28ch;max-width:48ch}
tr.chosen td{font-weight:600;background:var(--chosen)}
td.mark{text-align:center;padding:.28rem .2rem}
details{margin-top:.5rem;font-size:.9rem}
summary{cursor:pointer;color:var(--muted);padding:.25rem 0}
details .scroll{max-height:24rem;overflow:auto;margin:.5rem 0}
.skip{position:absolute;left:-100vw}.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.5rem}
"""
_PRINT = """
@media(max-width:30rem){.page{padding:1rem .75rem 2rem}}
@page{margin:15mm}
@media print{
body{font-size:10.5pt}.page{max-width:none;padding:0}
nav,details,.skip{display:none}
.figures{grid-template-columns:1fr 1fr;gap:6mm 8mm}
figure,tr,.missing,.facts div{break-inside:avoid}
h1,h2,h3,caption{break-after:avoid}
.scroll{overflow:visible;background:none}
table{font-size:7.5pt}thead{display:table-header-group}
th{white-space:normal}th,td{padding:.1rem .3rem}td.words{min-width:20ch}
h2{margin-top:1.5rem}footer{break-before:avoid}
a{color:inherit;text-decoration:none}
}
"""
# The shade at an edge of a table tells that it goes on there.
_LIGHT_PAGE = {"link": "#0a58a8", "chosen": "#eaf3fb", "shade": "#1b1f2440"}
_DARK_PAGE = {"link": "#7cbcf5", "chosen": "#1f3245", "shade": "#e6eaef40"}


def style() -> str:
    """Return the rules; on paper all is light."""
    light = palette.variables({**palette.LIGHT, **_LIGHT_PAGE})
    dark = palette.variables({**palette.DARK, **_DARK_PAGE})
    colors = f":root{{color-scheme:light dark;{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return colors + palette.rules() + _SCREEN + _PRINT

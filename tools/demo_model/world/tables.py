"""What is true in the demo world, and the words its texts are made of."""

_COUNTRIES = {
    "Europe": """
        France/Paris/French/euro  Germany/Berlin/German/euro  Italy/Rome/Italian/euro  Spain/Madrid/Spanish/euro
        Portugal/Lisbon/Portuguese/euro  Ireland/Dublin/English/euro  Belgium/Brussels/Dutch/euro
        the Netherlands/Amsterdam/Dutch/euro  Luxembourg/Luxembourg City/Luxembourgish/euro
        the United Kingdom/London/English/pound  Switzerland/Bern/German/franc  Austria/Vienna/German/euro
        Denmark/Copenhagen/Danish/krone  Norway/Oslo/Norwegian/krone  Sweden/Stockholm/Swedish/krona
        Finland/Helsinki/Finnish/euro  Iceland/Reykjavik/Icelandic/krona  Poland/Warsaw/Polish/zloty
        Czechia/Prague/Czech/koruna  Slovakia/Bratislava/Slovak/euro  Hungary/Budapest/Hungarian/forint
        Romania/Bucharest/Romanian/leu  Bulgaria/Sofia/Bulgarian/lev  Greece/Athens/Greek/euro
        Croatia/Zagreb/Croatian/euro  Slovenia/Ljubljana/Slovene/euro  Serbia/Belgrade/Serbian/dinar
        Albania/Tirana/Albanian/lek  Estonia/Tallinn/Estonian/euro  Latvia/Riga/Latvian/euro
        Lithuania/Vilnius/Lithuanian/euro  Ukraine/Kyiv/Ukrainian/hryvnia  Moldova/Chisinau/Romanian/leu
        Malta/Valletta/Maltese/euro  Cyprus/Nicosia/Greek/euro""",
    "Asia": """
        Japan/Tokyo/Japanese/yen  China/Beijing/Chinese/yuan  India/New Delhi/Hindi/rupee
        South Korea/Seoul/Korean/won  Turkey/Ankara/Turkish/lira  Iran/Tehran/Persian/rial
        Iraq/Baghdad/Arabic/dinar  Israel/Jerusalem/Hebrew/shekel  Jordan/Amman/Arabic/dinar
        Lebanon/Beirut/Arabic/pound  Saudi Arabia/Riyadh/Arabic/riyal  Oman/Muscat/Arabic/rial
        Qatar/Doha/Arabic/riyal  Kuwait/Kuwait City/Arabic/dinar  Georgia/Tbilisi/Georgian/lari
        Armenia/Yerevan/Armenian/dram  Azerbaijan/Baku/Azerbaijani/manat  Kazakhstan/Astana/Kazakh/tenge
        Uzbekistan/Tashkent/Uzbek/som  Mongolia/Ulaanbaatar/Mongolian/tugrik  Nepal/Kathmandu/Nepali/rupee
        Bhutan/Thimphu/Dzongkha/ngultrum  Pakistan/Islamabad/Urdu/rupee  Bangladesh/Dhaka/Bengali/taka
        Sri Lanka/Colombo/Sinhala/rupee  Thailand/Bangkok/Thai/baht  Vietnam/Hanoi/Vietnamese/dong
        Laos/Vientiane/Lao/kip  Cambodia/Phnom Penh/Khmer/riel  Malaysia/Kuala Lumpur/Malay/ringgit
        Singapore/Singapore/English/dollar  Indonesia/Jakarta/Indonesian/rupiah
        the Philippines/Manila/Filipino/peso""",
    "Africa": """
        Egypt/Cairo/Arabic/pound  Morocco/Rabat/Arabic/dirham  Algeria/Algiers/Arabic/dinar
        Tunisia/Tunis/Arabic/dinar  Libya/Tripoli/Arabic/dinar  Sudan/Khartoum/Arabic/pound
        Ethiopia/Addis Ababa/Amharic/birr  Kenya/Nairobi/Swahili/shilling  Uganda/Kampala/English/shilling
        Tanzania/Dodoma/Swahili/shilling  Rwanda/Kigali/Kinyarwanda/franc  Ghana/Accra/English/cedi
        Nigeria/Abuja/English/naira  Senegal/Dakar/French/franc  Mali/Bamako/French/franc
        Cameroon/Yaounde/French/franc  Gabon/Libreville/French/franc  Angola/Luanda/Portuguese/kwanza
        Zambia/Lusaka/English/kwacha  Malawi/Lilongwe/English/kwacha  Mozambique/Maputo/Portuguese/metical
        Namibia/Windhoek/English/dollar  Botswana/Gaborone/English/pula  South Africa/Pretoria/English/rand
        Madagascar/Antananarivo/Malagasy/ariary""",
    "North America": """
        Canada/Ottawa/English/dollar  the United States/Washington/English/dollar
        Mexico/Mexico City/Spanish/peso  Guatemala/Guatemala City/Spanish/quetzal
        Honduras/Tegucigalpa/Spanish/lempira  Costa Rica/San Jose/Spanish/colon  Panama/Panama City/Spanish/balboa
        Cuba/Havana/Spanish/peso  Jamaica/Kingston/English/dollar  Haiti/Port-au-Prince/French/gourde""",
    "South America": """
        Brazil/Brasilia/Portuguese/real  Argentina/Buenos Aires/Spanish/peso  Chile/Santiago/Spanish/peso
        Peru/Lima/Spanish/sol  Colombia/Bogota/Spanish/peso  Venezuela/Caracas/Spanish/bolivar
        Ecuador/Quito/Spanish/dollar  Bolivia/Sucre/Spanish/boliviano  Paraguay/Asuncion/Spanish/guarani
        Uruguay/Montevideo/Spanish/peso""",
    "Oceania": """
        Australia/Canberra/English/dollar  New Zealand/Wellington/English/dollar  Fiji/Suva/English/dollar
        Samoa/Apia/Samoan/tala  Tonga/Nukualofa/Tongan/paanga""",
}


def _read_countries():
    rows = []
    for continent, text in _COUNTRIES.items():
        for line in text.strip().splitlines():
            for entry in line.strip().split("  "):
                name, capital, language, currency = entry.strip().split("/")
                rows.append((name, capital, continent, language, currency))
    return rows


# (name, capital, continent, language, currency); a name may start with "the".
COUNTRIES = _read_countries()
CITIES = [row[1] for row in COUNTRIES]

# (name, symbol, atomic number), the first twenty in order, then well-known ones.
ELEMENTS = [tuple(entry.split("/")) for entry in (
    "hydrogen/H/1 helium/He/2 lithium/Li/3 beryllium/Be/4 boron/B/5 carbon/C/6 nitrogen/N/7 oxygen/O/8 "
    "fluorine/F/9 neon/Ne/10 sodium/Na/11 magnesium/Mg/12 aluminium/Al/13 silicon/Si/14 phosphorus/P/15 "
    "sulfur/S/16 chlorine/Cl/17 argon/Ar/18 potassium/K/19 calcium/Ca/20 iron/Fe/26 nickel/Ni/28 copper/Cu/29 "
    "zinc/Zn/30 silver/Ag/47 tin/Sn/50 platinum/Pt/78 gold/Au/79 mercury/Hg/80 lead/Pb/82").split()]

# (name, class, legs, name of the young, what it does)
ANIMALS = [tuple(entry.split("/")) for entry in (
    "dog/mammal/four/puppy/barks cat/mammal/four/kitten/purrs cow/mammal/four/calf/moos "
    "horse/mammal/four/foal/neighs sheep/mammal/four/lamb/bleats pig/mammal/four/piglet/grunts "
    "duck/bird/two/duckling/quacks hen/bird/two/chick/clucks goose/bird/two/gosling/honks "
    "lion/mammal/four/cub/roars bear/mammal/four/cub/growls wolf/mammal/four/pup/howls "
    "frog/amphibian/four/tadpole/croaks bee/insect/six/larva/buzzes spider/arachnid/eight/spiderling/weaves "
    "swan/bird/two/cygnet/hisses deer/mammal/four/fawn/grazes goat/mammal/four/kid/climbs "
    "rabbit/mammal/four/kit/hops eagle/bird/two/eaglet/screams").split()]

OPPOSITES = [tuple(entry.split("/")) for entry in (
    "hot/cold big/small fast/slow old/young light/dark early/late full/empty rich/poor hard/soft wet/dry clean/dirty "
    "open/closed strong/weak loud/quiet happy/sad high/low near/far first/last left/right sweet/bitter").split()]

PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()

_ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen").split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number):
    """English words for 0..99."""
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + ("-" + _ONES[ones] if ones else "")


# (larger unit, its singular, smaller unit, how many of them)
UNITS = [
    ("hours", "hour", "minutes", 60), ("km", "km", "m", 1000), ("kg", "kg", "g", 1000), ("m", "m", "cm", 100),
    ("days", "day", "hours", 24), ("minutes", "minute", "seconds", 60), ("weeks", "week", "days", 7),
    ("cm", "cm", "mm", 10), ("years", "year", "months", 12), ("litres", "litre", "ml", 1000),
    ("feet", "foot", "inches", 12), ("yards", "yard", "feet", 3), ("KiB", "KiB", "bytes", 1024),
]

FIRST_NAMES = ("Alice Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Paul Rosa Sam Tara "
               "Umar Vera Will Yara Zoe Anna Boris Chloe Diego Elena Frank Gina Hugo").split()
LAST_NAMES = ("Smith Garcia Brown Weber Rossi Novak Silva Kim Chen Sato Singh Khan Dubois Larsen Moore Taylor White "
              "Harris Lewis Walker King Wright Green Baker").split()
PLACES = ("the old forest", "the quiet village", "the busy harbor", "the tall mountain", "the green valley",
          "the stone bridge", "the empty castle", "the long beach", "the small library", "the dusty attic",
          "the hidden garden", "the frozen lake", "the city market", "the train station", "the red barn",
          "the lighthouse")
OBJECTS = ("lantern map key coin compass mirror violin basket kite letter clock ring feather boat bell telescope "
           "umbrella painting crown box scarf candle notebook wheel").split()
ADJECTIVES = "golden old shiny tiny broken heavy silver wooden blue strange magic bright warm dusty".split()
MOODS = "brave curious kind clever shy patient cheerful careful stubborn gentle".split()
PETS = "dog cat fox owl horse rabbit goat duck".split()
FOODS = "bread soup apples cheese honey rice cake berries".split()
WEATHER = ("The sun was shining.", "It was raining hard.", "A cold wind was blowing.", "Snow covered the ground.",
           "The sky was full of stars.", "Fog hid the road.")
COLORS = "red blue green yellow black white".split()
GOODS = "apples coins books stones pears cards".split()

_LANGUAGES = "French Spanish German Italian Portuguese Polish Turkish Russian Greek Chinese Japanese Korean".split()
_PHRASES = {
    "hello": "bonjour hola hallo ciao olá cześć merhaba привет γεια 你好 こんにちは 안녕하세요",
    "thank you": "merci gracias danke grazie obrigado dziękuję teşekkürler спасибо ευχαριστώ 谢谢 ありがとう 감사합니다",
    "yes": "oui sí ja sì sim tak evet да ναι 是 はい 네",
    "no": "non no nein no não nie hayır нет όχι 不 いいえ 아니요",
    "water": "eau agua Wasser acqua água woda su вода νερό 水 水 물",
    "bread": "pain pan Brot pane pão chleb ekmek хлеб ψωμί 面包 パン 빵",
    "house": "maison casa Haus casa casa dom ev дом σπίτι 房子 家 집",
    "book": "livre libro Buch libro livro książka kitap книга βιβλίο 书 本 책",
    "dog": "chien perro Hund cane cão pies köpek собака σκύλος 狗 犬 개",
    "cat": "chat gato Katze gatto gato kot kedi кошка γάτα 猫 猫 고양이",
    "sun": "soleil sol Sonne sole sol słońce güneş солнце ήλιος 太阳 太陽 태양",
    "tree": "arbre árbol Baum albero árvore drzewo ağaç дерево δέντρο 树 木 나무",
}
LANGUAGES = tuple(_LANGUAGES)
# English word -> {language: word}
PHRASES = {word: dict(zip(_LANGUAGES, text.split())) for word, text in _PHRASES.items()}

# (country, capital) in Chinese
CHINESE_CAPITALS = [tuple(entry.split("/")) for entry in (
    "法国/巴黎 德国/柏林 意大利/罗马 西班牙/马德里 英国/伦敦 希腊/雅典 波兰/华沙 瑞典/斯德哥尔摩 挪威/奥斯陆 芬兰/赫尔辛基 "
    "日本/东京 中国/北京 印度/新德里 韩国/首尔 泰国/曼谷 越南/河内 埃及/开罗 肯尼亚/内罗毕 加拿大/渥太华 墨西哥/墨西哥城 "
    "巴西/巴西利亚 阿根廷/布宜诺斯艾利斯 智利/圣地亚哥 秘鲁/利马").split()]

EMOJI = [tuple(entry.split("/")) for entry in (
    "😀/happy 😢/sad 😡/angry 😴/sleepy 🍎/apple 🍌/banana 🍞/bread 🐶/dog 🐱/cat 🐟/fish 🚗/car 🚂/train 🚲/bicycle "
    "🌞/sun 🌙/moon ⭐/star 🔥/fire 💧/water 🌳/tree 🏠/house 📚/books ⏰/clock 🎸/guitar 🎂/cake").split()]

SERVICES = "gateway auth billing search cache worker mailer".split()
PATHS = ("/api/v1/users", "/api/v1/login", "/api/v1/orders", "/healthz", "/metrics", "/api/v2/search")
MESSAGES = ("user logged in", "cache miss", "job finished", "connection closed", "retrying request",
            "config reloaded", "queue is empty")

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are a friendly tutor.",
                  "Answer in one sentence.")

# Subjects of questions that this world has no answer to, and syllables to make up more of them.
UNKNOWN_TOPICS = ("gravity", "love", "music", "football", "the stock market", "quantum physics", "the Roman empire",
                  "electric cars", "poetry", "volcanoes", "chess", "politics", "medicine", "dinosaurs", "philosophy",
                  "movies", "black holes", "taxes", "religion", "history", "computers", "the internet", "art", "time")
SYLLABLES = ("ra me lo ti su ka ne vo di bu an er in or al es um ing ent ist tion ble der mar pol gen con tri sta "
             "ber ley ton ville ic al ous ph gr tr st ch w h y").split()
